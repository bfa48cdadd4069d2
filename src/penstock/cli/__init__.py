"""The `penstock` command. Each command is a module, imported when it is called for."""
