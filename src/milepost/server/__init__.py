"""Bytes in, events out: the OpenAI routes, server-sent events, metrics."""

from __future__ import annotations

from milepost.server.app import create_app

__all__ = ["create_app"]
