"""ReTool's cold start: reasoning in words becomes reasoning with code that has run (docs/data.md).

    traces ─▶ endpoint (rewrites) ─▶ judge (with the sandbox, which runs the code) ─▶ ledger
      ─▶ train.parquet, rejected.jsonl, manifest.json

Source: ReTool, arXiv 2504.11536, section 3.1: conversion by a structured prompt, then format and answer verification.
"""
