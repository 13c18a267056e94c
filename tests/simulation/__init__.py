"""A deterministic simulation: the real code on simulated time, wires and processes, drawn from one seed.

See `make simulate`. `loop` has time and processes, `wire` what goes wrong between them; `database`, `queue` and
`server` have the real stores behind such a wire, `consumers` and `facts` the two worlds and what must hold in them.
"""
