"""`onceward demo`: thousands of orders, all kinds of failures, and a balance that must hold.

    shop: producer ─► boundary ══ link, cut for a while ══► boundary ─► two workers ─► inbox, ledger :warehouse
                                                                            └─► dead letters ─► redriven

tasks      the producer and the consumer: what a user of onceward writes
carrier    a service that the consumer calls: slow, flaky, and sometimes right to refuse
ledger     where an order takes effect, in one transaction with the inbox's record
orders     the orders, and what will go wrong with each

story      the demo from beginning to end: the link is cut, a worker is killed, a dead letter is redriven
line       all parts while they run, and an observer that waits for progress
shop       the shop's producer
zones      the two boundaries, and the network between them
crew       starts, kills and stops the processes that consume; worker is such a process
books      the state of everything, read while others write
journal    which worker got which order, so the demo knows what a crash left open
balance    whether the end is right

command    the arguments; setup is what follows from them
screen     what is shown during the demo and at its end
"""
