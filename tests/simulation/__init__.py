"""A deterministic simulation: the real code on simulated time, wires and processes, drawn from one seed.

See `make simulate`. `loop` has time and processes, `threads` their threads, `wire` what goes wrong between them;
`database`, `sources` and `server` have the real stores behind such a wire, and `brokers` models of servers.
`consumers`, `remote`, `relays`, `facts` and `links` are the worlds, and what must hold in them.
"""
