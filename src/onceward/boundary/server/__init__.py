"""A boundary as a server: one port for curl, Connect and gRPC."""
