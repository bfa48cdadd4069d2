"""Elements and messages as bytes. Nothing here is ever unpickled."""
