package proxy

import (
	"errors"
	"net/http"
	"time"

	"github.com/kvferry/kvferry/kv"
	"github.com/kvferry/kvferry/openai"
	"github.com/kvferry/kvferry/proxy/core"
)

func (r *Router) serveCompletion(w http.ResponseWriter, req *http.Request, api core.API) {
	start := time.Now()
	if n := r.inFlight.Add(1); n > int64(r.cfg.MaxInFlight) {
		r.inFlight.Add(-1)
		r.refuse(w, api, overloaded("The router already serves %d requests; try again later.", r.cfg.MaxInFlight))
		return
	}
	defer r.inFlight.Add(-1)
	if !r.gate.enter() {
		r.refuse(w, api, &openai.Error{Status: http.StatusServiceUnavailable, Type: openai.TypeServer, Message: "The router is shutting down."})
		return
	}
	defer r.gate.leave()
	named := req.Header.Get("X-Request-Id")
	if err := core.CheckClientRequestID(named); err != nil {
		r.refuse(w, api, err)
		return
	}
	if named != "" {
		w.Header().Set("X-Request-Id", named)
	}
	body, release, err := r.readBody(w, req)
	if err != nil {
		r.refuse(w, api, err)
		return
	}
	defer release()
	obj, err := openai.ParseObject(body)
	if err != nil {
		r.refuse(w, api, openai.JSONError(err))
		return
	}
	conversation, err := core.TakeConversation(obj, req.Header.Get("Authorization"))
	if err != nil {
		r.refuse(w, api, err)
		return
	}
	plan, err := core.NewPlan(api, obj)
	if err != nil {
		r.refuse(w, api, err)
		return
	}
	c := &client{r: r, w: w, rc: http.NewResponseController(w), req: req, plan: plan, id: named, start: start}
	defer c.done()
	unique := core.LegRequestID(named, newUUID())
	if len(plan.Answers) > 1 {
		newFan(c, unique).serve()
		return
	}
	if len(plan.Answers) == 1 {
		obj = plan.Answers[0]
	}
	q := r.newRequest(req.Context(), req.Header, plan, obj, c, func(attempt int) kv.RequestID {
		if attempt > 1 {
			unique = core.LegRequestID(named, newUUID())
		}
		return unique
	})
	q.conversation = conversation
	q.serve()
	c.finish(q.end())
}

// refuse answers a request that never reached an engine.
func (r *Router) refuse(w http.ResponseWriter, api core.API, err error) {
	var e *openai.Error
	if !errors.As(err, &e) {
		e = &openai.Error{Status: http.StatusBadRequest, Type: openai.TypeInvalidRequest, Message: err.Error()}
	}
	if e.Status == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", "1")
	}
	r.metrics.refused(api, e.Status)
	writeError(w, e)
}
