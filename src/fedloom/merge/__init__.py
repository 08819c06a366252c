"""All aggregation arithmetic: trees and weights in, one tree out. Pure."""
