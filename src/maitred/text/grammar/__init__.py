"""Formal grammars that constrain an answer: conversion of a caller's constraint to a grammar for llguidance."""
