"""Who does what? Decides; touches no tensor and no process group. Loads no torch.

`plan.uniform.plan(request, cluster)` is the plain answer; a `Plan` (plan/base.py) is data and can be edited.
"""
