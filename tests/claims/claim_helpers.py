"""What every claim's test asks for."""

from __future__ import annotations

import functools

from minifer.claims import registry
from minifer.claims.claim import BarPanel, Findings, Settings


@functools.cache
def found(name: str, seed: int = 0) -> Findings:
    """A claim's findings, computed once a test session."""
    return registry.get(name).reproduce(Settings(seed=seed, processes=1))


def check_complete(name: str, findings: Findings) -> None:
    """Nothing that a reader needs is missing, in the sentences, the tables and the figure."""
    claim = registry.get(name)
    assert claim.sources
    assert all(source.url.startswith("https://") for source in claim.sources)
    for sentence in (
        claim.statement,
        findings.basis,
        findings.verdict,
        findings.reproduction,
        findings.breaking,
    ):
        assert len(sentence) > 20
    assert findings.honest and findings.tables and findings.panels and findings.values
    assert all(len(row) == len(table.columns) for table in findings.tables for row in table.rows)
    for panel in findings.panels:
        assert panel.title and panel.x_label
        if isinstance(panel, BarPanel):
            assert all(len(values) == len(panel.names) for values in panel.bars.values())
            assert bool(panel.hollow) <= bool(panel.hollow_label)
        else:
            assert panel.y_label and panel.curves
            assert all(len(c.x) == len(c.y) > 0 and c.label for c in panel.curves)
            assert all(not c.hollow or panel.hollow_label for c in panel.curves)
