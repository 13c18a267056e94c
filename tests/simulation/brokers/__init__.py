"""Models of servers that cannot run inside a simulation, each compared with the real server: see the tests."""
