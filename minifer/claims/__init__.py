"""Claims about serving, each worked out again here, and broken by changing one assumption.

::

    from minifer.claims.claim import Settings
    from minifer.claims.registry import get

    findings = get("rare-bugs").reproduce(Settings(seed=0))
    print(findings.verdict)

**Read in this order.** `claim` says what a claim and its findings are; then one module a claim,
named as on the command line (`minifer claims list`); `registry` lists them, `report` and `figures`
show them. What is simulated is simulated by `minifer.simulation`, over the engine's own scheduler.
"""
