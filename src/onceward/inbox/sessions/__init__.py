"""The sessions that handlers get: the transaction that includes the inbox's row, and access to outside effects."""

from onceward.inbox.sessions.session import EffectfulSession, InboxSession, Joined

__all__ = ["EffectfulSession", "InboxSession", "Joined"]
