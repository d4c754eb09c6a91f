"""Roles: what one rank does for the actor, the critic, the reference; and how a worker declares its methods."""
