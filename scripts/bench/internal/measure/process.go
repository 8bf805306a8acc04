package measure

import (
	"fmt"
	"time"

	"github.com/prometheus/procfs"
)

// ResidentMemory of a process, in bytes.
func ResidentMemory(pid int) (int64, error) {
	stat, err := stat(pid)
	return int64(stat.ResidentMemory()), err
}

// ProcessorTime is what a process has used so far.
func ProcessorTime(pid int) (time.Duration, error) {
	stat, err := stat(pid)
	return time.Duration(stat.CPUTime() * float64(time.Second)), err
}

func stat(pid int) (procfs.ProcStat, error) {
	proc, err := procfs.NewProc(pid)
	if err != nil {
		return procfs.ProcStat{}, fmt.Errorf("look at process %d: %w", pid, err)
	}
	stat, err := proc.Stat()
	if err != nil {
		return procfs.ProcStat{}, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return stat, nil
}
