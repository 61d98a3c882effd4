"""What every benchmark shares: arms timed in turns, robust statistics, the record, the report.

Machines drift: clocks, caches, other processes. So the arms of a comparison take turns in one
process, round after round, and the figure that counts is the median over the rounds of the ratio
*within* a round; whatever slows a whole round down cancels. Medians and percentiles, never means.

| module       | what                                                                   |
|--------------|------------------------------------------------------------------------|
| `ways`       | the arms of training: each compiler, around one loop                   |
| `timing`     | arms that take turns, what a device needs for it, medians and ratios   |
| `peak`       | the most memory that a step allocates                                  |
| `processes`  | a function called in a fresh process                                   |
| `report`     | the settings of a run, the machine, tables, the files of a report      |
| `checking`   | a rerun against what is committed                                      |
"""
