package main

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/proxy"
	"github.com/kvferry/kvferry/proxy/core"
)

// targetKeys are what --prefill and --decode take behind the URL.
var targetKeys = []string{"engine-id", "side-channel", "tp", "pp", "mode"}

// parseTarget reads `URL[,KEY=VALUE]…`: an engine, and of a stock one what it cannot be asked for.
func parseTarget(flag, s string) (proxy.Target, error) {
	url, rest, more := strings.Cut(s, ",")
	t := proxy.Target{URL: url}
	if !more {
		return t, nil
	}
	bad := func(format string, args ...any) (proxy.Target, error) {
		return t, usagef("--%s %q: %s", flag, s, fmt.Sprintf(format, args...))
	}
	p := core.Peer{TPSize: 1, PPSize: 1}
	seen := map[string]bool{}
	number := func(value string) (int, error) {
		n, err := strconv.Atoi(value)
		if err != nil {
			return 0, errors.New("not a whole number")
		}
		return n, nil
	}
	for _, item := range strings.Split(rest, ",") {
		key, value, ok := strings.Cut(item, "=")
		switch {
		case !ok || value == "":
			return bad("%q is no KEY=VALUE", item)
		case !slices.Contains(targetKeys, key):
			return bad("%q is unknown, use %s", key, strings.Join(targetKeys, ", "))
		case flag == "decode" && key != "mode":
			return bad("%s is a prefill engine's; of a decode engine only mode= is needed", key)
		case seen[key]:
			return bad("%s is given twice", key)
		}
		seen[key] = true
		var err error
		switch key {
		case "engine-id":
			p.EngineID = kv.EngineID(value)
		case "side-channel":
			var port string
			if p.Host, port, err = net.SplitHostPort(value); err == nil {
				p.Port, err = number(port)
			}
		case "tp":
			p.TPSize, err = number(value)
		case "pp":
			p.PPSize, err = number(value)
		case "mode":
			if p.Mode = kv.TransferMode(value); p.Mode != kv.Push && p.Mode != kv.Pull {
				err = fmt.Errorf("use push or pull")
			}
		}
		if err != nil {
			return bad("%s: %v", item, err)
		}
	}
	if flag == "prefill" && p.Mode != kv.Pull && (!seen["engine-id"] || !seen["side-channel"]) {
		return bad("a prefill engine that pushes needs engine-id= and side-channel=; one that pulls mode=pull")
	}
	t.Peer = &p
	return t, nil
}
