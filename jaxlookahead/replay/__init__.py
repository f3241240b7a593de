"""Replays recorded responses against a drafter, to measure drafts without a model."""
