"""Looks at a machine, or all machines of a job, before a training runs on them."""

from distdiag.doctor.answers import Answer, State
from distdiag.doctor.machine import look_at_machine

__all__ = ["Answer", "State", "look_at_machine"]
