"""`onceward demo`: thousands of orders, everything that goes wrong with them, and a balance that must hold.

tasks      the producer and the consumer: what a user of onceward writes
cards      a service they use: slow, flaky, and sometimes right to refuse
ledger     a service they use: where an order takes effect, once
orders     what is ordered, and what is going to go wrong with it

story      the demo from its beginning to its end
crew       starts, kills and stops the processes that consume; worker is such a process
balance    whether the end is right
journal    who was given which message: how the demo knows what a crash left open
books      the state of queue, ledger and journal, read while workers write; files is how they write

command    the arguments; setup is what follows from them
screen     what is shown meanwhile; summary is what is shown at the end, result what there is to show
"""
