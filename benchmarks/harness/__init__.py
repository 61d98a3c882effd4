"""What every benchmark shares: arms timed in turns, robust statistics, the record, the report.

Machines drift: clocks, caches, other processes. So the arms of a comparison take turns in one
process, round after round, and the figure that counts is the median over the rounds of the ratio
*within* a round; whatever slows a whole round down cancels. Medians and percentiles, never means.

| module       | what                                                                   |
|--------------|------------------------------------------------------------------------|
| `timing`     | arms that take turns, and what a device needs for it                   |
| `ratios`     | medians and percentiles of samples, ratios of two arms                 |
| `processes`  | a measurement in a fresh process                                       |
| `record`     | the machine and the versions that were measured                        |
| `report`     | the settings of a run, its tables, the files that it leaves            |
"""
