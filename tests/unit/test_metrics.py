from prometheus_client.parser import text_string_to_metric_families

from loongd.metrics import Metrics


def values(metrics):
    """Every sample by name and by its own labels, without those that all share."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            found[(sample.name.removeprefix("loongd:"), *labels.values())] = sample.value
    return found


def finish(metrics, reason, **changes):
    durations = {"queue_s": 1.0, "ttft_s": 3.0, "e2e_s": 13.0, "decode_s": 10.0}
    metrics.request_finished(
        reason, prompt_tokens=100, generated_tokens=11, **(durations | changes)
    )


def test_every_request_that_started_has_one_end():
    metrics = Metrics("tiny")
    for _ in range(6):
        metrics.request_started(100, 50)
    metrics.request_rejected("queue_full")
    metrics.request_rejected("context_length_exceeded")
    finish(metrics, "stop")
    finish(metrics, "length")
    finish(metrics, "error", queue_s=None, ttft_s=None, decode_s=None)
    metrics.request_cancelled("client")
    got = values(metrics)
    started = got["requests_started_total",]
    ends = sum(
        value
        for (name, *_), value in got.items()
        if name
        in (
            "request_success_total",
            "requests_failed_total",
            "requests_aborted_total",
            "admission_rejections_total",
            "requests_in_flight",
        )
    )
    assert started == ends == 8
    assert got["requests_in_flight",] == 2
    assert got["request_success_total", "stop"] == 1
    assert got["requests_aborted_total", "client"] == 1
    assert got["admission_rejections_total", "queue_full"] == 1
    assert got["prompt_tokens_total",] == 600


def test_durations_of_a_finished_request():
    metrics = Metrics("tiny")
    metrics.request_started(100, 50)
    finish(metrics, "stop")
    got = values(metrics)
    assert got["request_queue_time_seconds_sum",] == 1
    assert got["request_prefill_time_seconds_sum",] == 2
    assert got["request_decode_time_seconds_sum",] == 10
    assert got["request_time_per_output_token_seconds_sum",] == 1
    assert got["e2e_request_latency_seconds_sum",] == 13
    assert got["request_generation_tokens_sum",] == 11


def test_buckets_hold_long_prompts_and_long_waits():
    metrics = Metrics("tiny")
    metrics.request_started(1_000_000, 1_000_000)
    metrics.first_token(1100.0)
    got = values(metrics)
    assert got["request_prompt_tokens_bucket", "524288.0"] == 0
    assert got["request_prompt_tokens_bucket", "1.048576e+06"] == 1
    assert got["time_to_first_token_seconds_bucket", "600.0"] == 0
    assert got["time_to_first_token_seconds_bucket", "1200.0"] == 1


def test_tokens_are_counted_as_they_are_drawn():
    metrics = Metrics("tiny")
    metrics.first_token(0.5)
    metrics.inter_token(0.1)
    metrics.inter_token(0.1)
    got = values(metrics)
    assert got["generation_tokens_total",] == 3
    assert got["time_to_first_token_seconds_count",] == 1
    assert got["inter_token_latency_seconds_count",] == 2


def test_odd_numbers_never_raise():
    metrics = Metrics("tiny")
    metrics.first_token(-0.1)
    metrics.inter_token(float("nan"))
    metrics.set_pool(0, 0, 0, 0)
    metrics.set_instances(3, 2)
    metrics.request_started(-1, 1)
    got = values(metrics)
    assert got["kv_cache_usage_perc",] == 0
    assert got["inter_token_latency_seconds_count",] == 0


def test_pool_steps_and_elasticity():
    metrics = Metrics("tiny")
    metrics.set_pool(total=200, used=50, free=150, reserved=30)
    metrics.set_queue(running=2, waiting=3)
    metrics.set_instances(ready=3, total=4)
    metrics.step("prefill", 4, 4096, 0.5)
    metrics.step("decode", 1, 8, 0.01)
    metrics.scale_event("down")
    metrics.pool_audit(True)
    metrics.pool_audit(False)
    metrics.preempted()
    metrics.engine_restarted()
    metrics.requests_restarted(2)
    got = values(metrics)
    assert got["kv_cache_usage_perc",] == 0.25
    states = {
        state: got["kv_pool_tokens", state] for state in ("total", "used", "free", "reserved")
    }
    assert states == {"total": 200, "used": 50, "free": 150, "reserved": 30}
    assert (got["num_requests_running",], got["num_requests_waiting",]) == (2, 3)
    assert (got["esp_instances", "ready"], got["esp_instances", "lost"]) == (3, 1)
    assert got["esp_degree_sum", "prefill"] == 4
    assert got["esp_degree_sum", "decode"] == 1
    assert got["iteration_tokens_total_sum",] == 4104
    assert got["esp_scale_events_total", "down"] == 1
    assert got["kv_pool_audits_total", "mismatch"] == 1
    assert got["num_preemptions_total",] == 1
    assert got["engine_restarts_total",] == 1
    assert got["requests_restarted_total",] == 2
