"""A long prompt alone on a running loongd, and with short prompts beside it, over HTTP.

For each length: the time to first token of the prompt while nothing else runs (median of some), and
of the same while short prompts come at a steady rate, with the times of these. Prompts are random
token ids from a seed. `--beside RESULT` adds the ratio to the lone times of an earlier result: of a
daemon without a bound (`--max-prefill-wait 1000`) that is what the bound costs.

    tools/bench_alone.py --url http://127.0.0.1:8000 --lengths 64000,150000 --vocab 32000 \\
        --quiet 20 --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from bench_serving import Item, Outcome, percentile, send
from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
SHORT_TOKENS = 200
SHORT_OUTPUT_TOKENS = 8


class Client:
    """Sends prompts of random ids to one server."""

    def __init__(self, session: aiohttp.ClientSession, vocab: int, seed: int, model: str) -> None:
        self._session = session
        self._vocab = vocab
        self._chance = random.Random(seed)
        self._model = model

    async def send(self, num_tokens: int, num_output: int, at_s: float = 0.0) -> Outcome:
        """One prompt, `at_s` seconds from now. Raises SystemExit when it fails."""
        ids = [self._chance.randrange(3, self._vocab) for _ in range(num_tokens)]
        began_s = asyncio.get_running_loop().time()
        item = Item(at_s, num_tokens, num_output)
        outcome = await send(self._session, item, began_s, ids, self._model)
        if outcome.error is not None:
            raise SystemExit(f"{num_tokens:,} tokens: {outcome.error}")
        return outcome


async def measure(client: Client, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """One length, alone and then with others beside it."""
    lone = []
    for _ in range(args.repeats):
        await asyncio.sleep(args.quiet)
        lone.append(_ttft(await client.send(length, 1)))
    expected_s = median(lone)
    figures: dict[str, Any] = {"num_tokens": length, "lone_ttft_s": lone}
    if args.rate:
        await asyncio.sleep(args.quiet)
        count = max(3, int(expected_s * args.rate))
        shorts = [
            client.send(SHORT_TOKENS, SHORT_OUTPUT_TOKENS, (n + 0.5) / args.rate)
            for n in range(count)
        ]
        long, *short = await asyncio.gather(client.send(length, 1), *shorts)
        times = [_ttft(outcome) for outcome in short]
        figures |= {
            "ttft_beside_shorts_s": _ttft(long),
            "short_ttft_s": {p: percentile(times, p / 100) for p in (50, 90, 100)},
            "num_shorts": count,
        }
    return figures


def _ttft(outcome: Outcome) -> float:
    assert outcome.ttft_s is not None, "no token came"
    return outcome.ttft_s


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All lengths, one after the other."""
    timeout = aiohttp.ClientTimeout(total=None)
    found = []
    async with aiohttp.ClientSession(args.url, timeout=timeout, read_bufsize=1 << 24) as session:
        async with session.get("/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        client = Client(session, args.vocab, args.seed, model)
        await client.send(2000, 2)
        for length in args.lengths:
            figures = await measure(client, length, args)
            found.append(figures)
            print(json.dumps(figures), flush=True)
    return found


def add_ratios(found: list[dict[str, Any]], beside: Path) -> None:
    """Lone times over those of an earlier result."""
    before = {one["num_tokens"]: one for one in json.loads(beside.read_text())["results"]}
    for figures in found:
        other = before.get(figures["num_tokens"])
        if other is not None:
            ratio = median(figures["lone_ttft_s"]) / median(other["lone_ttft_s"])
            figures["of_other_lone_ttft"] = ratio
            print(f"{figures['num_tokens']:,} tokens: {ratio:.3f} of {beside.name}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench_alone.py", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--lengths", type=lambda text: [int(one) for one in text.split(",")], required=True
    )
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.0, help="short prompts a second")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds before each prompt")
    parser.add_argument("--commit", default="", help="where this is no git checkout")
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = asyncio.run(run(args))
    if args.beside is not None:
        add_ratios(found, args.beside)
    if args.out is not None:
        origin = provenance(ROOT, ("loongd", "tools/bench_alone.py"))
        result = {
            "command": "tools/bench_alone.py " + " ".join(sys.argv[1:]),
            "commit": args.commit or origin.commit,
            "date": origin.date,
            "results": found,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
