"""Sending from an app: what decorated functions can, and over which connections."""
