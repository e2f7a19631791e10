"""Messages that leave a process, as bounded msgpack."""
