"""The HTTP front: OpenAI-compatible API, health, metrics, and the admin API of the unix socket."""
