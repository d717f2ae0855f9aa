"""Parameters in the files of pipeline stages whose strategy does not list them, as tied embeddings are."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import CheckpointError, InputError
from reshard.forms.ranks.checkpoint import RankCheckpoint
from reshard.strategies import Strategy
from reshard.text.messages import listing
from reshard.text.report import Report
from reshard.text.wording import number_ranges

# Pairs of pipeline stages that are told of one by one.
_MOST_STAGES = 2


def problems_of_unlisted(
    checkpoint: RankCheckpoint, source: Strategy, strict: bool, report: Report
) -> list[InputError]:
    """Parameters that a stage's ranks hold although only another stage's strategy lists them."""
    stages = source.stages
    step = checkpoint.source
    if len(stages) < 2:
        return []
    by_stages: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    everywhere = step.names().intersection(name for stage in stages for name in stage.layouts)
    whole = 0
    for stage in stages:
        held: set[str] = set()
        for names in {frozenset(step.indexes[rank].tensors) for rank in step.loaded(stage)}:
            held |= names
        whole += everywhere <= held
        for name in sorted((held & everywhere) - stage.layouts.keys()):
            listed_by = tuple(other.number for other in stages if name in other.layouts)
            by_stages.setdefault((stage.number, listed_by), []).append(name)
    told: list[tuple[str, str]] = []
    if whole == len({number for number, _ in by_stages}) == len(stages):
        text = (
            f"ranks of every pipeline stage hold all {len(everywhere)} parameters, which the source strategy shares "
            f"out among {len(stages)} stages: is it the strategy of another run?"
        )
        told.append((text, next(iter(by_stages.values()))[0]))
    elif len(by_stages) > _MOST_STAGES:
        # Said for each pair of stages it would fill a screen.
        unlisted = sorted({name for names in by_stages.values() for name in names})
        numbers = f"stages {number_ranges(number for number, _ in by_stages)}"
        told.append((_said_of_unlisted(checkpoint, numbers, "other stages", unlisted), unlisted[0]))
    else:
        for (number, listed_by), unlisted in by_stages.items():
            elsewhere = f"stage {', '.join(map(str, listed_by))}"
            told.append((_said_of_unlisted(checkpoint, f"stage {number}", elsewhere, unlisted), unlisted[0]))
    if strict:
        return [CheckpointError(text, parameter=name, hint="without --strict this is a warning") for text, name in told]
    for text, _ in told:
        report.warn(text)
    return []


def _said_of_unlisted(checkpoint: RankCheckpoint, stage: str, elsewhere: str, unlisted: Sequence[str]) -> str:
    text = f"ranks of pipeline {stage} hold " + listing(unlisted)
    taken, them = ("it is taken", "it") if len(unlisted) == 1 else ("they are taken", "them")
    text += (
        f", which the source strategy lists only for {elsewhere}; {taken} from there, and the target's last stage may "
        f"be expecting {them} too"
    )
    nowhere = [name for name in unlisted if name not in checkpoint.tensors]
    if nowhere:
        text += f"; in no file of {elsewhere} is " + listing(nowhere) + ", so that is not converted"
    return text
