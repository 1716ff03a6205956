"""wrapping: put outcore around a model, in place, or around a part of a notebook."""

from outcore.wrapping.sessions import Session, handle, session, unwrap, wrap

__all__ = ["Session", "handle", "session", "unwrap", "wrap"]
