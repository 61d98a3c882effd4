"""What was compiled is compared once, with real data, with what was meant.

Data flows one way: `reference` runs a graph operator by operator, `judge` compares what came out,
`case` compiles again what was wrong, `first_call` does all three at a function's first call,
`verdicts` remembers. docs/design/0019-verification.md tells how it decides and what it can't see.
"""
