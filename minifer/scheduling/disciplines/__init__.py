"""Orders from queueing theory and from papers: who is next when requests differ in length.

=======  ==================================================  =======================================
`sjf`    the shortest prefill first, then to its end         starves the long without ageing
`srpt`   the shortest remaining prefill, asked every step    the same; the best mean there is
`mlfq`   who has had least so far, in levels                 asks for no lengths; does work twice
`vtc`    the tenant that has had least so far                fair to tenants, whatever they send
=======  ==================================================  =======================================

What a prompt costs is known when it comes, and what its answer costs is not: the first two order
prefills alone. Whoever decodes goes on.
"""

from minifer.scheduling.disciplines.mlfq import SkipJoinMLFQ
from minifer.scheduling.disciplines.shortest_first import ShortestFirst
from minifer.scheduling.disciplines.vtc import VirtualTokenCounter

__all__ = ["ShortestFirst", "SkipJoinMLFQ", "VirtualTokenCounter"]
