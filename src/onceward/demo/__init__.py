"""`onceward demo`: thousands of orders, everything that goes wrong on their way, and a balance that must hold.

    shop: producer ─► boundary ══ link, cut for a while ══► boundary ─► two workers ─► inbox, ledger :warehouse
                                                                            └─► dead letters ─► redriven

tasks      the producer and the consumer: what a user of onceward writes
carrier    a service the consumer uses: slow, flaky, and sometimes right to refuse
ledger     where an order takes effect: in one transaction with the inbox's record
orders     what is ordered, and what is going to go wrong with it

story      the demo from its beginning to its end; acts are its turning points, watch waits for them
line       all parts while they run
sending    the shop's producer; zones are the two boundaries, wire the network between them
crew       starts, kills and stops the processes that consume; worker is such a process
processes  what all child processes have in common; attached has them end when we do
books      the state of everything, read while others write; files is how the small ones are written
journal    who was given which order: how the demo knows what a crash left open
balance    whether the end is right

command    the arguments; setup is what follows from them
screen     what is shown meanwhile; summary is what is shown at the end, result what there is to show
"""
