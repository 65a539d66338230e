"""Load a running loongd (or any OpenAI-compatible server) with a length trace over HTTP.

Open loop: request i is sent at its arrival time divided by the rate, whatever the server does.
Prompts are random token ids from a seed, output lengths are forced (`ignore_eos`), answers are
streamed. Prints a table and writes JSON: time to first token (TTFT), time per output token (TPOT)
and end-to-end time, for all prompts and by length class.

    tools/bench_serving.py --url http://127.0.0.1:8000 --trace TRACE.csv.gz --rate 1 \
        --num-requests 100 --input-cap 200000 --vocab 32000 --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

_READ_BYTES = 1 << 24
"""The first event of an answer names all ids of its prompt, in one line."""
CLASSES = ((0, 4096), (4096, 32768), (32768, 1 << 40))


@dataclass(frozen=True)
class Item:
    """One request of the trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass
class Outcome:
    """What a client saw; times in seconds since the request was due."""

    input_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    end_s: float | None = None
    received: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.end_s is None or self.received < 2:
            return None
        return (self.end_s - self.ttft_s) / (self.received - 1)


def read_trace(path: Path, *, count: int, rate: float, cap: int) -> list[Item]:
    """The first `count` rows of `arrival_s,input_len,output_len`, stretched to `rate`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    first = float(rows[0]["arrival_s"])
    return [
        Item(
            (float(row["arrival_s"]) - first) / rate,
            min(int(row["input_len"]), cap),
            int(row["output_len"]),
        )
        for row in rows
    ]


async def send(
    session: aiohttp.ClientSession, item: Item, began_s: float, ids: list[int], model: str
) -> Outcome:
    """One streamed request, sent when it is due."""
    outcome = Outcome(item.input_tokens, item.output_tokens)
    due = began_s + item.arrival_s
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": item.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                outcome.error = f"{answer.status}: {await answer.text()}"
                return outcome
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    _take(json.loads(line[6:]), outcome, time.monotonic() - due)
    except aiohttp.ClientError as error:
        outcome.error = repr(error)
    outcome.end_s = time.monotonic() - due
    return outcome


def _take(chunk: dict[str, Any], outcome: Outcome, at_s: float) -> None:
    if "error" in chunk:
        outcome.error = json.dumps(chunk["error"])
    elif chunk.get("usage"):
        outcome.received = chunk["usage"]["completion_tokens"]
    elif chunk.get("choices") and outcome.ttft_s is None:
        outcome.ttft_s = at_s


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Percentiles of one class of requests."""
    ttft = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    tpot = [o.tpot_s for o in outcomes if o.tpot_s is not None]
    ends = [o.end_s for o in outcomes if o.end_s is not None]
    named = {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": ends}
    return {
        "count": len(outcomes),
        "errors": sum(o.error is not None for o in outcomes),
        **{
            name: {
                f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)
            }
            for name, values in named.items()
        },
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole load; the result as written to JSON."""
    items = read_trace(args.trace, count=args.num_requests, rate=args.rate, cap=args.input_cap)
    draw = random.Random(args.seed)
    prompts = [[draw.randrange(args.vocab) for _ in range(item.input_tokens)] for item in items]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        args.url, timeout=timeout, connector=connector, read_bufsize=_READ_BYTES
    ) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        began = time.monotonic()
        tasks = [
            asyncio.create_task(send(session, item, began, ids, model))
            for item, ids in zip(items, prompts, strict=True)
        ]
        for number, task in enumerate(asyncio.as_completed(tasks)):
            await task
            if sys.stderr.isatty():
                print(f"\r{number + 1}/{len(tasks)} requests", end="", file=sys.stderr)
        wall_s = time.monotonic() - began
    outcomes = [task.result() for task in tasks]
    by_class = {
        f"{lo}-{hi if hi < 1 << 40 else 'max'}": summary(
            [o for o in outcomes if lo <= o.input_tokens < hi]
        )
        for lo, hi in CLASSES
    }
    return {
        "command": " ".join(sys.argv),
        "commit": _commit(),
        "label": args.label,
        "wall_s": wall_s,
        "output_tokens_per_s": sum(o.received for o in outcomes) / wall_s,
        "all": summary(outcomes),
        "by_input_tokens": by_class,
        "requests": [asdict(o) for o in outcomes],
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Exit code 0 when every request was answered in full."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--input-cap", type=int, default=200_000)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", default="", help="kept in the result")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, part in (("all", result["all"]), *result["by_input_tokens"].items()):
        print(f"{name:>14}  {json.dumps(part)}")
    short = [o for o in result["requests"] if o["error"] or o["received"] != o["output_tokens"]]
    for outcome in short[:5]:
        print(f"incomplete: {outcome}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
