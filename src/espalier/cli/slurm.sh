#!/bin/bash
# Written by `espalier train --slurm`. Submitting it again goes on from the newest checkpoint.
@OPTIONS@

cd @FOLDER@ || exit 2
# srun does not take this over from sbatch by itself (Slurm 22.05 and later).
if [ -n "$SLURM_CPUS_PER_TASK" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

step=
asked=
signals=0
status=1

# The first signal asks the run to save and stop; a second one would end it at once.
hear() {
    asked="$asked $1"
    signals=$((signals + 1))
    if [ "$signals" = 1 ] && [ -n "$step" ]; then kill -USR1 "$step"; fi
}
trap 'hear USR1' USR1
trap 'hear TERM' TERM

saved() { grep -c '"event":"checkpoint"' @EVENTS@ 2>/dev/null; }

# USR1: the time is nearly up, or the job is to be preempted. TERM comes then too, but also when somebody cancels it; with
# a partition's GraceTime it comes to the tasks alone, which then save and end as signalled (128 and more).
wanted() {
    case "$asked" in
        *USR1*) return 0 ;;
        *TERM*) ;;
        *) [ "$status" -ge 128 ] || return 1 ;;
    esac
    scontrol show job "$SLURM_JOB_ID" | grep -qE 'JobState=PREEMPTED|PreemptTime=[0-9]'
}

before=$(saved)
@COMMAND@ &
step=$!
if [ -n "$asked" ]; then kill -USR1 "$step"; fi

# A signal that is trapped ends `wait` before the step has ended.
while :; do
    heard=$signals
    wait "$step"
    ended=$?
    if [ "$ended" != 127 ]; then status=$ended; fi
    if [ "$signals" = "$heard" ]; then break; fi
done

if [ "$status" != 0 ] && wanted; then
    # Nothing saved in one life after the other: the time is too short for it, and no further life would help.
    if [ "$(saved)" != "$before" ] || [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "espalier: not requeued, because nothing was saved since this life began" >&2
    fi
fi
exit "$status"
