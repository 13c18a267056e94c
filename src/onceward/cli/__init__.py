"""The `onceward` command. `main` assembles the command groups; each has its own file or folder."""
