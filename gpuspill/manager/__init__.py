"""The proxify manager and the parts it is made of; :mod:`gpuspill.manager.manager` names them."""

from __future__ import annotations

from gpuspill.manager.manager import ProxifyManager

__all__ = ["ProxifyManager"]
