"""How fast, compared with a plain transcription of the official code and with a peer."""
