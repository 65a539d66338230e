"""loongd: an LLM serving daemon with elastic sequence parallelism."""

__version__ = "0.1.0"
