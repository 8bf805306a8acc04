// Command primary plays the plugin before portolan in the chain: it writes each
// command and container to the file "log" of its configuration, and answers ADD
// with the object "result" as it stands.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

func main() {
	if err := run(os.Getenv("CNI_COMMAND")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(command string) error {
	if command == "VERSION" {
		_, err := io.WriteString(os.Stdout, `{"cniVersion":"1.1.0","supportedVersions":["0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]}`)
		return err
	}
	var conf struct {
		Log    string          `json:"log"`
		Result json.RawMessage `json:"result"`
	}
	if err := json.NewDecoder(os.Stdin).Decode(&conf); err != nil {
		return err
	}
	log, err := os.OpenFile(conf.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(log, command, os.Getenv("CNI_CONTAINERID")); err != nil {
		return err
	}
	if err := log.Close(); err != nil {
		return err
	}
	if command == "ADD" {
		_, err = os.Stdout.Write(conf.Result)
	}
	return err
}
