"""Dynamo's graph -> what it is planned by -> the rewritten graph -> what runs."""
