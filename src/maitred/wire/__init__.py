"""Wire formats: conversion between bytes and structs for APIs, event streams, engines and workers.

The modules perform no I/O.
"""
