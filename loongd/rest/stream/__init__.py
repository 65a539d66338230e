"""From token streams to text, and from text to server-sent events."""
