"""Every kind of event: what may stand in an event file or travel between nodes."""

from __future__ import annotations

from distdiag.checkpoint_event import (
    LoadWasted,
    StateRestored,
    StateSaved,
    TrainingResumed,
    WeightsLoaded,
)
from distdiag.data_event import EpochFed, ModelFed, RowsGathered, ScheduleState
from distdiag.event import (
    Collective,
    CollectiveState,
    Exited,
    FileAccess,
    FileClosed,
    Finished,
    GroupCreated,
    Heartbeat,
    HostSynced,
    NodeLost,
    Observed,
    ProbeDisabled,
    ProcessesSpawned,
    Raised,
    RankStarted,
    Signalled,
    Stacks,
    StepEnd,
    SteppedAlone,
    StoreCall,
    TorchLoaded,
    Unobserved,
)
from distdiag.gradient_event import GradientSums
from distdiag.loss_event import LossWeights
from distdiag.model_event import (
    ModelPlan,
    ModelState,
    OptimizerState,
    PartialRead,
    SliceSaved,
)
from distdiag.plan_event import PlanPatterns
from distdiag.random_event import RandomDraw, RandomState
from distdiag.routing_event import (
    AuxLoss,
    CounterWritten,
    CountsHeld,
    Routing,
    TokensExchanged,
)
from distdiag.sequence_event import SequenceUnverified, TokenPassport
from distdiag.sequence_use_event import AttentionUnread, SequenceUse

AnyEvent = (
    RankStarted
    | TorchLoaded
    | GroupCreated
    | ProcessesSpawned
    | Collective
    | CollectiveState
    | StepEnd
    | SteppedAlone
    | Raised
    | Signalled
    | Finished
    | ProbeDisabled
    | Unobserved
    | Heartbeat
    | Exited
    | Stacks
    | Observed
    | FileAccess
    | FileClosed
    | StoreCall
    | HostSynced
    | NodeLost
    | ModelPlan
    | ModelState
    | OptimizerState
    | PartialRead
    | SliceSaved
    | PlanPatterns
    | RandomState
    | RandomDraw
    | LossWeights
    | WeightsLoaded
    | LoadWasted
    | StateSaved
    | StateRestored
    | TrainingResumed
    | EpochFed
    | ModelFed
    | ScheduleState
    | RowsGathered
    | TokenPassport
    | SequenceUnverified
    | SequenceUse
    | AttentionUnread
    | Routing
    | CounterWritten
    | TokensExchanged
    | CountsHeld
    | AuxLoss
    | GradientSums
)
