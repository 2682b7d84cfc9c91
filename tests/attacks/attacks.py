"""The attacks of the table in docs/protocol.md."""

from __future__ import annotations

from tests.attacks import members, poisons, strangers
from tests.attacks.attack import MemberAttack, StrangerAttack

ATTACKS: dict[str, type[MemberAttack] | type[StrangerAttack]] = {
    "1": members.OtherTerms,
    "1b": members.BetterTip,
    "2": members.SenselessBegin,
    "3": members.RefusesJoins,
    "4": members.CommitOfNothing,
    "7a": members.SilentCoordinator,
    "7b": members.NeverCalls,
    "7c": members.NeverBegins,
    "7d": members.NeverCommits,
    "7e": members.EndsRounds,
    "8": members.Ghosts,
    "8b": members.DeadNodes,
    "9": members.BadWeights,
    "9b": members.KeepsResults,
    "9c": members.NeverDone,
    "10a": members.Elsewhere,
    "10b": strangers.StrangersCall,
    "10c": members.MembersCall,
    "11": strangers.UnsignedRecords,
    "12": strangers.Stores,
    "12b": strangers.ManyStores,
    "13": strangers.IdleConnections,
    "14": strangers.TakesState,
    "17a": members.HugeAttempt,
    "17b": members.HugeBallot,
    "18": members.Surveys,
    "19a": members.WholeTarget,
    "19b": members.HugeStep,
}
"""By their numbers in the table; letters tell several readings of one apart."""

POISONS: dict[str, type[MemberAttack] | type[StrangerAttack]] = {
    "5": poisons.CommitOfLies,
    "6": poisons.LaterState,
    "15a": poisons.HugeGradients,
    "15b": poisons.HugeWeights,
    "16a": poisons.LyingReducer,
    "16b": poisons.LiesToOne,
}
"""See `poisons`. Not among those that honest peers must withstand in an open run."""
