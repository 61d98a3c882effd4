"""The cost of each precision, the assignment of precisions that costs least, and what was decided:
`GraphPlan`, the plan of one graph, as plain data that prints itself and answers questions.
"""
