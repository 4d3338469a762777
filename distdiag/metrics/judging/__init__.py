"""What curves tell: observations, each with its step and the lines of the log it rests on."""

from distdiag.metrics.judging.judge import judge, judge_runs
from distdiag.metrics.judging.observation import Judgement, Kind, Observation, Point

__all__ = ["Judgement", "Kind", "Observation", "Point", "judge", "judge_runs"]
