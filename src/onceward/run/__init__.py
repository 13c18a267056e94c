"""Running an app: supervised worker processes, signals, health."""
