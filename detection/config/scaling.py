"""A schedule for another number of processes than the one that it is written for."""

from fvcore.common.config import CfgNode

from moco.common.errors import UserError


def scale_to_processes(cfg: CfgNode, num_processes: int) -> list[str]:
    """Scale batch, learning rate and schedule (in place) as Detectron2 does, and say so.

    The rule is that of `DefaultTrainer.auto_scale_workers`: the batch of each process stays, the
    learning rate follows the whole batch (Goyal et al. 2017), and the durations in iterations are
    divided, so that the number of epochs stays. With SOLVER.REFERENCE_WORLD_SIZE 0 nothing changes.

    Raises:
        UserError: the batch cannot be divided among the reference's processes.
    """
    solver, test = cfg.SOLVER, cfg.TEST
    reference = solver.REFERENCE_WORLD_SIZE
    if reference in (0, num_processes):
        return []
    if reference < 0 or solver.IMS_PER_BATCH % reference:
        raise UserError(
            f"SOLVER.REFERENCE_WORLD_SIZE: got {reference}, expected a divisor of "
            f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH}"
        )
    before = (solver.IMS_PER_BATCH, solver.BASE_LR, solver.MAX_ITER)
    scale = num_processes / reference
    solver.IMS_PER_BATCH = round(solver.IMS_PER_BATCH * scale)
    solver.BASE_LR = solver.BASE_LR * scale
    solver.MAX_ITER = round(solver.MAX_ITER / scale)
    solver.WARMUP_ITERS = round(solver.WARMUP_ITERS / scale)
    solver.STEPS = tuple(round(step / scale) for step in solver.STEPS)
    solver.CHECKPOINT_PERIOD = max(1, round(solver.CHECKPOINT_PERIOD / scale))
    test.EVAL_PERIOD = round(test.EVAL_PERIOD / scale)
    solver.REFERENCE_WORLD_SIZE = num_processes
    return [
        f"scaled from {reference} to {num_processes} processes: batch {before[0]} -> "
        f"{solver.IMS_PER_BATCH}, learning rate {before[1]:g} -> {solver.BASE_LR:g}, iterations "
        f"{before[2]} -> {solver.MAX_ITER}, steps {tuple(solver.STEPS)}, warm-up "
        f"{solver.WARMUP_ITERS}",
        f"not equivalent after scaling: BN sees {solver.IMS_PER_BATCH} images at once instead of "
        f"{before[0]}, and the rule for the learning rate holds approximately",
    ]
