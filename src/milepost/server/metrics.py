"""In: the engine's `Stats` and the timings of finished requests. Out: Prometheus text.

The law kept here: names that exist in vLLM mean the same here, so its boards work; ours begin with `milepost:`.
Nothing is global: each server has its own registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from milepost.config import EngineConfig
from milepost.engine.stats import Stats, Timing

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)


class Metrics:
    """All metrics of one server."""

    def __init__(self, model: str, config: EngineConfig, read: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatsCollector(model, config, read))

        def histogram(name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(f"vllm:{name}", help, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._interval = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _TOKEN_SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queued = histogram("request_queue_time_seconds", "From arrival to admission.")
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end.")

    def observe_finished(self, timing: Timing) -> None:
        """A request has finished. Called from the engine's thread."""
        self._whole.observe(timing.finished)
        self._queued.observe(timing.queued)
        if timing.first_token is not None:
            self._first_token.observe(timing.first_token)
            self._prefill.observe(max(0.0, timing.first_token - timing.queued))
            self._decode.observe(max(0.0, timing.finished - timing.first_token))

    def observe_interval(self, seconds: float) -> None:
        """Time between two tokens of one answer. Called from the engine's thread."""
        self._interval.observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _StatsCollector(Collector):
    """Turns one snapshot of the engine into metrics each time that Prometheus asks."""

    def __init__(self, model: str, config: EngineConfig, read: Callable[[], Stats]) -> None:
        self._model = model
        self._config = config
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not read the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        yield from self._vllm(stats)
        yield from self._ours(stats)

    def _vllm(self, stats: Stats) -> Iterator[Metric]:
        pools = stats.pools
        in_use = pools.slots_used * pools.slot_bytes + pools.blocks_used * pools.block_bytes
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the arena that running requests hold (1 = all).",
            in_use / pools.budget_bytes if pools.budget_bytes else 0.0,
        )  # fmt: skip
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix tree.", stats.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens whose computation was skipped.", stats.prefix_hits)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests sent back to the queue.", stats.preemptions)
        yield self._counters("vllm:request_success", "Finished requests.", "finished_reason", stats.finished)
        info = {
            "model_name": self._model,
            "block_size": str(pools.block_size),
            "enable_prefix_caching": str(self._config.enable_prefix_caching),
            "cache_dtype": self._config.kv_cache_dtype,
            "mamba_cache_dtype": self._config.mamba_cache_dtype,
            "mamba_ssm_cache_dtype": self._config.mamba_ssm_cache_dtype,
            "kv_cache_memory_bytes": str(pools.budget_bytes),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "How the cache is set up.", labels=list(info))
        gauge.add_metric(list(info.values()), 1)
        yield gauge

    def _ours(self, stats: Stats) -> Iterator[Metric]:
        pools = stats.pools
        yield self._gauge("milepost:arena_bytes", "The arena's budget.", pools.budget_bytes)
        yield self._gauge("milepost:arena_free_bytes", "Bytes of the arena that nobody holds.", pools.free_bytes)
        yield self._gauge("milepost:slots_used", "Live slots of running requests.", pools.slots_used)
        yield self._gauge("milepost:slots_total", "Slots that may be live at once.", pools.slots_total)
        tiers = GaugeMetricFamily("milepost:checkpoints", "Checkpoints held.", labels=["model_name", "tier"])
        tiers.add_metric([self._model, "arena"], pools.checkpoints)
        yield tiers
        sizes = GaugeMetricFamily("milepost:checkpoint_bytes", "Bytes of checkpoints.", labels=["model_name", "tier"])
        sizes.add_metric([self._model, "arena"], pools.checkpoint_bytes)
        yield sizes
        blocks = GaugeMetricFamily("milepost:blocks", "Blocks of KV by holder.", labels=["model_name", "holder"])
        blocks.add_metric([self._model, "running"], pools.blocks_used)
        blocks.add_metric([self._model, "cached"], pools.blocks_cached)
        yield blocks
        yield self._counter("milepost:steps", "Steps of the engine.", stats.steps)
        yield self._counter("milepost:computed_prompt_tokens", "Prompt tokens computed.", stats.computed_prompt_tokens)
        yield self._counter("milepost:prefix_hit_tokens_lost", "Tokens whose KV matched but no checkpoint.", stats.lost_hits)
        yield self._counter("milepost:evictions", "Checkpoints and blocks freed for others.", stats.evictions)
        yield self._counters("milepost:captures", "Checkpoints published.", "reason", stats.captures)
        yield self._counters("milepost:captures_skipped", "Checkpoints not taken.", "reason", stats.skipped_captures)
        yield self._counters("milepost:recomputed_tokens", "Tokens computed again.", "reason", stats.recomputed)
        yield self._counters(
            "milepost:verification_failures", "Checkpoints that failed their check.", "reason",
            stats.verification_failures,
        )  # fmt: skip
        yield self._counters("milepost:concurrency_bound", "Steps in which a request waited.", "limit", stats.bound_by)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, help, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _counter(self, name: str, help: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, help, labels=["model_name"])
        counter.add_metric([self._model], value)
        return counter

    def _counters(self, name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(name, help, labels=["model_name", label])
        for key, value in sorted(values.items()):
            counter.add_metric([self._model, key], value)
        return counter
