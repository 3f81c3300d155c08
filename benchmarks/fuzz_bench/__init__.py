"""Messages that nobody should send, at every service of a whole one in this process."""
