"""Decide, then run: scheduler (integers only), batch, runner, sampler, the loop."""
