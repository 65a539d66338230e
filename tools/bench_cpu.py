"""Decode speed on the CPU beside transformers, in one run, and the daemon's memory.

Starts loongd with one instance on all cores and SmolLM2, and loads the same weights into
transformers with as many threads. The two take turns, so that a machine whose speed drifts does
not favour one; each round decodes `--tokens` tokens greedily after a prompt of `--prompt` tokens.
Writes JSON: tokens per second of each round, the ratio of the medians, and the daemon's RSS.

    python tools/bench_cpu.py --dtype float32 --out tools/results/cpu_decode.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from loongd.model.cache import converted_dir

ROOT = Path(__file__).resolve().parent.parent


def model_dir(dtype: str) -> Path:
    """SmolLM2 converted to `dtype`, as the daemon itself would do it."""
    fetched = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_model"], check=True, capture_output=True, text=True
    )
    gguf = Path(fetched.stdout.strip())
    directory = converted_dir(gguf, dtype, Path.home() / ".cache" / "loongd" / "converted")
    convert = [sys.executable, "-m", "loongd.model.convert", "--dtype", dtype]
    subprocess.run([*convert, gguf, directory], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return directory


class Loongd:
    """A daemon of our own; `decode` times the stream after its first token."""

    def __init__(self, model: Path, dtype: str, directory: Path) -> None:
        config = directory / "loongd.toml"
        config.touch()
        self._log = directory / "log"
        command = [sys.executable, "-m", "loongd", "--config", config, "--model", model]
        command += ["--dtype", dtype, "--device", "cpu", "--instances", "1", "--port", "0"]
        command += ["--runtime-dir", directory / "run"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, cwd=ROOT)
        while "ready: " not in self._log.read_text():
            if self.process.poll() is not None:
                raise SystemExit(self._log.read_text())
            time.sleep(0.1)
        self._url = self._log.read_text().split("API on ")[1].split(",")[0]

    def decode(self, prompt: list[int], tokens: int) -> float:
        """Tokens per second."""
        body = {"prompt": prompt, "max_tokens": tokens + 1, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode())
        first_s, seen = 0.0, 0
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    seen += len(choice.get("token_ids") or ())
                first_s = first_s or time.perf_counter()
        assert seen == tokens + 1, seen
        return tokens / (time.perf_counter() - first_s)

    @property
    def rss_mb(self) -> float:
        """Resident memory of the daemon's own process."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("no VmRSS")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def transformers_decode(model: LlamaForCausalLM, prompt: list[int], tokens: int) -> float:
    """Tokens per second of `generate`, less the time of its first token."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    options |= {"pad_token_id": 0, "eos_token_id": None}

    def timed(count: int) -> float:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        return time.perf_counter() - began

    return tokens / (timed(tokens + 1) - timed(1))


def main() -> int:
    """Exit code 0 when the ratio and the memory are within the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    directory = model_dir(args.dtype)
    prompt = [(17 * i) % 4000 + 300 for i in range(args.prompt)]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype))
    ours, theirs = [], []
    with tempfile.TemporaryDirectory(prefix="loongd-bench-") as name:
        server = Loongd(directory, args.dtype, Path(name))
        try:
            for number in range(args.rounds + 1):
                pair = (
                    server.decode(prompt, args.tokens),
                    transformers_decode(model, prompt, args.tokens),
                )
                print(f"round {number}: loongd {pair[0]:.1f}, transformers {pair[1]:.1f} tokens/s")
                if number:  # the first is warm-up
                    ours.append(pair[0])
                    theirs.append(pair[1])
            rss_mb = server.rss_mb
        finally:
            server.stop()
    ratio = statistics.median(ours) / statistics.median(theirs)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    result = {
        "command": " ".join(["tools/bench_cpu.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "torch": torch.__version__,
        "dtype": args.dtype,
        "loongd_tokens_per_s": [round(x, 2) for x in ours],
        "transformers_tokens_per_s": [round(x, 2) for x in theirs],
        "ratio_of_medians": round(ratio, 3),
        "daemon_rss_mb": round(rss_mb, 1),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ratio >= 0.6 and rss_mb < 150 else 1


if __name__ == "__main__":
    sys.exit(main())
