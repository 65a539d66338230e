"""What every handler needs, in one frozen value.

Knows: the engine, the text tools, the limits. Does not know: how any of them is made.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from loongd import __version__
from loongd.config import Config
from loongd.metrics import Metrics
from loongd.profiling.profiler import Profiler
from loongd.submission import Engine
from loongd.text.tokenizer import Tokenizer

SYSTEM_FINGERPRINT = f"loongd-{__version__}"


@dataclass(frozen=True, slots=True)
class RestContext:
    """Handed to `make_app` and `make_admin_app`.

    Args:
        engine: serves submissions.
        tokenizer: None with dummy weights; then prompts and answers are token ids only.
        config: the daemon's options.
        model_name: the one name that clients may use.
        vocab_size: rows of the model's embedding; every token id is below it.
        metrics: rendered by /metrics; requests that are refused are counted by who answers them.
        started_at: Unix seconds, the model's `created`.
        default_sampling: of generation_config.json, such as temperature, top_p, top_k, min_p,
            repetition_penalty; used where a request names none.
        profiler: measures the workers on request; None where there are none.
        is_ending: whether the daemon is on its way out, which nothing takes back.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    config: Config
    model_name: str
    vocab_size: int
    metrics: Metrics
    started_at: int
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    profiler: Profiler | None = None
    is_ending: Callable[[], bool] = lambda: False


CONTEXT = web.AppKey("context", RestContext)
REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_S = web.RequestKey("arrived_s", float)
PREDICTED_TTFT_S = web.RequestKey("predicted_ttft_s", float)
IS_ROUGH_TTFT = web.RequestKey("is_rough_ttft", bool)

log = logging.getLogger("loongd.rest")


def new_response_id(prefix: str, request: web.Request) -> str:
    """An id that is unique in this daemon, and shows the client's own x-request-id if it gave one.

    Submissions carry it too, so the id in a response leads to the request's story.
    """
    own = request.headers.get("x-request-id")
    if own != request[REQUEST_ID]:
        return f"{prefix}-{request[REQUEST_ID]}"
    return f"{prefix}-{own}-{uuid.uuid4().hex[:8]}"
