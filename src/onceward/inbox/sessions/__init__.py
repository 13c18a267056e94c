"""The sessions a handler gets: the transaction that also holds the inbox's row, and the way to effects outside."""

from onceward.inbox.sessions.session import EffectfulSession, InboxSession, Joined

__all__ = ["EffectfulSession", "InboxSession", "Joined"]
