"""Pipeline schedules as data: made by name or by hand, verified, timed and drawn before anything runs.

schedule = by_name("1f1b", ranks=4, microbatches=8)
print(schedule)                              one line a rank: 0F0 0F1 …
schedule.verify()                            bubble, peak, or a ScheduleError that says what is wrong
schedule.timeline(Costs(F=2, B=3, hop=0.1))  when each action runs
schedule.draw()                              SVG; a notebook shows it
memory_report(step.lower(…))                 bytes that each rank will hold
with record() as recording: step(…)          what really ran: recording.draw(), .chrome_trace(), .costs()
"""

from fmeg.pipeline.costs import Costs, LayerCosts
from fmeg.pipeline.draw import compare, draw
from fmeg.pipeline.errors import DeadlockError, ScheduleError
from fmeg.pipeline.export import chrome_trace, png
from fmeg.pipeline.memory import peaks
from fmeg.pipeline.names import SCHEDULES, by_name
from fmeg.pipeline.record import Recording, Run, record
from fmeg.pipeline.report import MemoryReport, memory_report
from fmeg.pipeline.schedule import Action, Schedule, stage_map
from fmeg.pipeline.simulate import Timeline, capacity_needed, timeline
from fmeg.pipeline.verify import Report, verify

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "DeadlockError",
    "LayerCosts",
    "MemoryReport",
    "Recording",
    "Report",
    "Run",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "by_name",
    "capacity_needed",
    "chrome_trace",
    "compare",
    "draw",
    "memory_report",
    "peaks",
    "png",
    "record",
    "stage_map",
    "timeline",
    "verify",
]
